"""The method as pure functions of tensors in plain torch: what every backend must equal. No input, no output."""
