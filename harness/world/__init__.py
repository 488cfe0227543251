"""Real ranks: a warm server that forks them, and everything that keeps one job from harming another."""
