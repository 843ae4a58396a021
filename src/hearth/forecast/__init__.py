"""Forecasts how many requests will come for each model."""
