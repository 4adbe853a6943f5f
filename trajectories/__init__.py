"""The contract between actors and learner: tasks, episodes, closings, rows and their wire format.

Pure data and pure functions: nothing here knows Beam, JAX, threads or clocks.
"""
