"""A training on disk: safetensors and JSON, never a pickle; written whole or not at all.

    FOLDER/00007-step-350/
        model.safetensors       the model's state_dict(), under its own names; tied weights under each of theirs
        loss.safetensors        the loss's, where it has one
        training.safetensors    the optimiser's tensors, "model.WEIGHT/KEY" and "loss.WEIGHT/KEY"
        checkpoint.json         everything else: format, version, step, seed, plan, precision, the model's fingerprint,
                                the files' sums, the optimiser by weight, scheduler, loss scale, feed

Which ranks held what when it was saved is nowhere in it, so it is loaded under any plan.
"""
