"""Export and import of models in Hugging Face's formats, upload to its Hub, and the model card."""
