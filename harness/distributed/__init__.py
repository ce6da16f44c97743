"""The ranks of a run: what the launcher says of this one, how all meet, what they tell one another outside the exchange
of gradients, how one that is stuck or gone is noticed and named, and how all stop together.
"""
