"""Training of recommendation models: embedding tables over devices, and the steps of a model that has them."""
