"""Speed beside its floors and dense attention: what `bpc bench` runs."""
