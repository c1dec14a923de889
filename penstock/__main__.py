"""`python -m penstock` is `penstock`."""

from penstock.console.main import main

if __name__ == "__main__":
    main()
