"""nsa-sel as a kernel of Hugging Face `kernels`."""
