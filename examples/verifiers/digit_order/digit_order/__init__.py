"""Environment package with one turn per episode and three reward functions."""

from digit_order.taskset import DigitOrderTaskset

__all__ = ["DigitOrderTaskset"]
