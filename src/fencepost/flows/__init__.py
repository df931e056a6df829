"""The protocols, each written once as ``async def``: they gather facts, ask the model, and act.

The rules of a flow: it awaits only the world, a store or another flow; it never catches
``BaseException``; each loop has a stop or a bound; *outcome unknown* is never taken for *refused*.
"""
