"""The method: pure functions of tensors in plain torch, without I/O. Every backend must return the same results."""
