"""What the Triton backends share: the softmax and gradient steps, the walk over a row's keys, the dK/dV visit of KV tiles, launches."""
