"""Save and load a training: safetensors and JSON, never a pickle; a checkpoint is written completely or not at all.

    FOLDER/00007-step-350/
        model.safetensors       state_dict() of the model under its own names; tied weights once per name
        loss.safetensors        state_dict() of the loss, if it has one
        training.safetensors    the optimiser's tensors, "model.WEIGHT/KEY" and "loss.WEIGHT/KEY"
        checkpoint.json         the rest: format, version, step, seed, plan, precision, the model's fingerprint,
                                checksums of the files, optimiser state by weight, scheduler, loss scale, feed

A checkpoint does not record which rank held which tensor, so that it can be loaded under any plan.
"""
