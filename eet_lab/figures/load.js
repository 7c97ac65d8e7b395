// The module of each widget that shares a script (script.py). It is short, since it stands in all of them.

let drawing;

async function load(model) {
  const base = await model.widget_manager.get_model(model.get("base").replace("IPY_MODEL_", ""));
  const file = new Blob([base.get("source"), model.get("source")], { type: "text/javascript" });
  const url = URL.createObjectURL(file);
  return import(url).finally(() => URL.revokeObjectURL(url));
}

export default {
  async render(context) {
    drawing ||= load(context.model);
    return (await drawing).default.render(context);
  },
};
