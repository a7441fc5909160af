"""Models: describe them (`description`), load them (`loading`), observe their attention (`observation`).

Everything else asks here what a model is. May import `errors`, `hub`, `compat` and `demo`.
"""
