"""Models, DP-SGD and its gradient engines, plain SGD, devices."""
