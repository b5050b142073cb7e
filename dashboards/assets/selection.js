// Panel of the selected span: filled by the server, closed with Esc, copied as text.
window.overlapscope.selectionPanel = ({clear, zoomTo}) => {
  const element = (id) => document.getElementById(id)
  const panel = element("selection")
  if (!panel) return {show: () => {}, hide: () => {}}

  let shown = null

  function text() {
    const title = panel.querySelector("h2").textContent
    const columns = (cell) => cell.textContent.trim().replace(/\s+/g, " ") + "\t".repeat(cell.colSpan - 1)
    const facts = Array.from(panel.querySelectorAll("dt"), (dt) => `${dt.textContent}\t${dt.nextElementSibling.textContent}`)
    const rows = Array.from(panel.querySelectorAll("tr"), (row) =>
      Array.from(row.cells, columns).join("\t"),
    )
    return [title, ...facts, "", ...rows].join("\n")
  }

  async function copy() {
    const isCopied = await window.overlapscope.copy(text(), element("selection-content"))
    element("copy").textContent = isCopied ? "Copied" : "Press Ctrl-C"
    setTimeout(() => (element("copy").textContent = "Copy"), 2000)
  }

  element("copy").addEventListener("click", copy)
  element("close").addEventListener("click", clear)
  element("zoom-to").addEventListener("click", zoomTo)

  return {
    show(markup) {
      if (markup !== shown) element("selection-content").innerHTML = shown = markup
      panel.hidden = false
    },
    hide: () => (panel.hidden = true),
  }
}
