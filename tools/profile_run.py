"""`megastable profile`. Not called profile.py, which would hide a module of Python from all scripts beside it."""

from megastable.cli import main

if __name__ == "__main__":
    main("profile")
