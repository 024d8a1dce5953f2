"""`python -m milldam`, the same as `milldam`."""

from milldam.cli import main

if __name__ == "__main__":
    main()
