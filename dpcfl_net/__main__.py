"""`python -m dpcfl_net` is `dpcfl`."""

from dpcfl_net.launch.cli import main

if __name__ == "__main__":
    main()
