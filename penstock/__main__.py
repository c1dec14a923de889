"""`python -m penstock` is `penstock`."""

from penstock.gateway.__main__ import main

if __name__ == "__main__":
    main()
