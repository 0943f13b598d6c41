"""`python -m mtpdeploy` is `mtpdeploy`."""

from mtpdeploy.cli import main

if __name__ == "__main__":
    main()
