"""`python -m bpc_cli`, which torchrun starts once per process: the same as `bpc`."""

from bpc_cli.main import main

main()
