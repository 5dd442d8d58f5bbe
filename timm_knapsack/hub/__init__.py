"""Room hub: saving and publishing.

In: a pruned model or result.
Out: a folder that ``timm.create_model`` reads, its model card, a commit on the Hub.
"""
