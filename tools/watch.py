"""`megastable watch`."""

from megastable.cli import main

if __name__ == "__main__":
    main("watch")
