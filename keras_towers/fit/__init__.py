"""The only folder that knows the inside of Keras.

==================  =====================================================
module              what it owns
==================  =====================================================
``tower``           what a tower knows about itself while its step runs
``variables``       one variable on every tower, and views of one tower
``state``           which variables, optimizers and trainers a model has
``adoption``        re-homing a model onto towers, and back
``optimizer``       reduce first, then apply once
``losses``          loss denominators over the whole global batch
``step``            one global batch on all towers, exact logs
``data``            batches for towers
``hooks``           what is patched in Keras, and for how long
==================  =====================================================
"""
