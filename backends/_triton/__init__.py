"""Code that the Triton backends share: online softmax and gradients, walks over a row's keys, plans, dK/dV, kernel
launches."""
