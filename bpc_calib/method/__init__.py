"""The method as pure functions of tensors, in plain torch: what every backend must return.

Holds codes, fitting, hashing, scoring, selection and the oracle of a decoding step. May import `errors` alone.
"""
