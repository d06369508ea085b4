"""`k3-chat`: the model as somebody to talk to. The room above the engine.

So far it shows the chat format: `render` prints what a request becomes, `parse` what a completion means.
"""
