"""Translation of axolotl's configs."""
