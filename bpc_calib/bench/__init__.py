"""Speed beside its floors and dense attention: what `bpc bench` runs.

Times a layer, whole models and prefill. May import `errors`, `compat`, `method`, `models`, `backends` and `runtime`.
"""
