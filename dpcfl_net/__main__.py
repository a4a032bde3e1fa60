"""`python -m dpcfl_net` is `dpcfl`."""

from launch.cli import main

if __name__ == "__main__":
    main()
