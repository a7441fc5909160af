"""`python -m bpc_cli`, which torchrun starts as each of its ranks."""

from bpc_cli.main import main

if __name__ == "__main__":
    main()
