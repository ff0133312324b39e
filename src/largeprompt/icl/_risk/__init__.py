"""The risk of a layer: the ways to find it, and the one place that chooses among them."""
