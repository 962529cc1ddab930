"""What a run leaves behind and what a person sees of it: metrics, console, TensorBoard, rollouts, plots, reports."""
