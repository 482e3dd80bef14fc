"""What a machine is: its GPUs, their numbers and how they are connected."""
