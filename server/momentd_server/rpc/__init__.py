"""The two planes and the one dispatcher behind them."""
