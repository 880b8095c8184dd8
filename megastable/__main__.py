"""`python -m megastable COMMAND ...`, the same as `megastable COMMAND ...`."""

from megastable.cli import main

if __name__ == "__main__":
    main()
