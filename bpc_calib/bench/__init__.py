"""Speed beside its floors, dense attention and the paper's pipeline: what `bpc bench` runs."""
