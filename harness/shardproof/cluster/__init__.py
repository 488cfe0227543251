"""Runs on a cluster: what a node does, who hands scenarios out, and the adapter to Ray.

handout.py   the executor: which slot gets which scenario, what becomes of a lost node; knows no cluster software
node.py      what runs on a node: one laboratory, asked for one scenario at a time
on_ray.py    nodes, slots and calls as Ray has them; the only module that imports it
"""
