// What reading takes of forward_blocks.cu: its grid and clusters, its producer's TMA loads, and their barriers. It computes nothing.
//
// Consumers wait for the keys and then for the values of each step, take one word of both, and release the stage. A row's words, combined
// by XOR, go to its lse, so that no load of them is left out. o is not written.
//
//   RESULTS  0: reading alone; 1: queries are loaded, and results sent in clusters and written, as if they had been computed
#include "forward_blocks.cu"

struct Reader : Consumer {
    u32 words = 0;
    using Consumer::Consumer;

    DEVICE void load_q(const Problem &p, const RowHeads &heads) {
        if (RESULTS) Consumer::load_q(p, heads);
    }

    DEVICE void attend(unsigned char *stages, PipelineState<STAGES> &at) {
        for (int keys = 0; !(keys & LAST); at.next()) {
            const u32 *k_tile = reinterpret_cast<u32 *>(stages + at.stage * STAGE_BYTES), *v_tile = k_tile + K_BYTES / 4;
            shared.steps.wait_full(at);
            keys = shared.keys[at.stage];
            if (keys != LAST) words ^= *k_tile;
            mbarrier_wait(&shared.values[at.stage], at.parity);
            if (keys != LAST) words ^= *v_tile;
            __syncwarp();
            shared.steps.release(at.stage);
        }
        if (RESULTS) no_step();
    }

    DEVICE void finish(const Arguments &x, const RowHeads &heads) {
        if (RESULTS) Consumer::finish(x, heads);
        if (rank == 0 && threadIdx.x == 0) x.lse[heads.first(x)] = __int_as_float(static_cast<int>(words));
    }
};

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS + 32, PER_SM) reading_alone(const __grid_constant__ Arguments x) {
    attend_rows<Reader>(x);
}
