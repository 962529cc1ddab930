"""Translation of axolotl configs."""
