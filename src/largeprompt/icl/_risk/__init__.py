"""The risk of a layer: four ways to find it, and the one place that chooses among them."""
