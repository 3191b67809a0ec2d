"""What a machine is: GPUs and how many blocks of a kernel live on them."""
