"""Prices of exchanges, and what follows from them: fusion plans, ratios, periods, placements; pure numbers."""
