"""Analysis of a traced loss: how micro-batch losses combine to the batch loss, and which labels are class numbers."""
