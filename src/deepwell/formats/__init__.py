"""What a number is: the formats Deepwell computes in, their exact quantizers and memory layouts."""
