"""Models in Hugging Face's formats and on its Hub: export, import, upload, and the model card."""
