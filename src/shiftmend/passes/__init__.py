"""The one evaluation loop over a model and its data, with observers."""
