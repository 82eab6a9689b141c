"""What the Triton backends share: online softmax and gradients, walks over a row's keys, plans, dK/dV by KV tiles, kernel launches."""
