"""The stationary points of the risk: where training can end."""
