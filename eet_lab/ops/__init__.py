"""What a decoder is made of: each op's meaning (`reference`) and its CUDA kernels (`cuda`, `native`)."""
