"""Many runs side by side: which was better, beyond noise, and what each cost. It reads what `runs/` says was left, and
never imports `training/`.
"""
