"""Runs `dpcfl` for `python -m dpcfl_net`."""

from dpcfl_net.launch.cli import main

if __name__ == "__main__":
    main()
